"""The laboratory: experiments that measure what decoupling costs, on a CPU, with the real parts and a tiny policy."""
