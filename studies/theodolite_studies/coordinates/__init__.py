"""Do stream, branches and logits keep their size over width and depth?"""
