"""The benchmark harness: retrograde and its peers on the same model, batch and machine, interleaved."""
