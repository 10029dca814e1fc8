"""The bundled minimal engine: one decoder for calibration and inference."""
