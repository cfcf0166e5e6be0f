"""Does the best learning rate stay over width and depth?"""
