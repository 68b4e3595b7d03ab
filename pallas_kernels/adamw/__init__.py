from pallas_kernels.adamw.op import Factors, Hyperparameters, adamw_apply, adamw_step, factors

__all__ = ["Factors", "Hyperparameters", "adamw_apply", "adamw_step", "factors"]
