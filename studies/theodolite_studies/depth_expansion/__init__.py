"""ResNets over depth and width, and their activation gradients."""
