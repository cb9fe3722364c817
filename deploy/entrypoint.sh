#!/bin/sh
# Keys and options are the runner's; anything else is a program, such as torchrun or TorchX's bash.
case "${1-}" in
  "" | [-~]* | *=*) exec python -m ddp_runner "$@" ;;
  *) exec "$@" ;;
esac
