"""Is diffGrad better than Adam?"""
