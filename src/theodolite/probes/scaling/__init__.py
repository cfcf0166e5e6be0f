"""Do values, weights and steps keep their size as the network grows?"""
