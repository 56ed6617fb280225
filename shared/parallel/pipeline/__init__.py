"""Chapter 08. Pipeline parallelism: schedules as data, and the runner that executes any of them."""
