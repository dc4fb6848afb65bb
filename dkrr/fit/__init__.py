"""A fit: what is asked, what "auto" becomes and what that costs, and the tries that lead to the coefficients."""
