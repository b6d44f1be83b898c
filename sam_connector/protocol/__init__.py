"""Words on the wire: hints in, results out, and the call between the processes."""
