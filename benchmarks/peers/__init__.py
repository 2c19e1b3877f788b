"""The contenders of the speed table. Each module has `build(spec)`, returning an object with `run_steps(k)`."""
