"""Is a schedule refined from the gradient norms of a first run a better one?"""
