"""Serving: tables split over cards, and a server that speaks the Open Inference Protocol."""
