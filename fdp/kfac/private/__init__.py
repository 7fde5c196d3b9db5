"""K-FAC in private training: curvature from public data or noised statistics, applied before clipping."""
