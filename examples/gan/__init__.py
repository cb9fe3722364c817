"""An example: a GAN, which a training step with one optimizer cannot express."""
