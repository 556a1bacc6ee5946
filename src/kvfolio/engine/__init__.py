"""Making it happen: scheduler, ledger, store, network, sampler and text joined into one loop."""
