"""Do scale vectors precondition, and should they decay?"""
