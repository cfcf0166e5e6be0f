"""How does gradient-normalized smoothness grow on the way to a minimum?"""
