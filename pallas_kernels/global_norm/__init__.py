from pallas_kernels.global_norm.op import Numerics, global_norm, norm_of_tiles, tile_of, tile_sums

__all__ = ["Numerics", "global_norm", "norm_of_tiles", "tile_of", "tile_sums"]
