"""The GPUs of this machine."""


def count_gpus() -> int:
    """Ask NVIDIA's driver.

    Raises:
        Exception: NVML's or Python's, whatever the driver's state suggests; its text
            says why there is none.
    """
    import pynvml

    pynvml.nvmlInit()
    return int(pynvml.nvmlDeviceGetCount())
