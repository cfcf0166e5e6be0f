"""Does training collapse where a step leaves the radius of convergence of the loss?"""
