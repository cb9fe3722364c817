// What runs on the device, compiled as one file: torch's headers take most of the time of each.
#include "operators.cpp"
#include "copies.cpp"
#include "tensors.cpp"
#include "autocast.cpp"
