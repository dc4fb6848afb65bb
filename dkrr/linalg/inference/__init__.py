"""What a solution is worth: leave-one-out, diagonals of inverses, variances, intervals, paths over alpha."""
