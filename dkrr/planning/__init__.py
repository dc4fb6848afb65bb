"""What "auto" becomes: the choice a user may make, the cost model, rates of the machine, iterations, the decision."""
