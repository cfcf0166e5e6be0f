"""Forecasts of the loss at the next scale: intervals with checked coverage, and checks by later runs."""

from theodolite.forecasting.checking import ForecastCheck, check
from theodolite.forecasting.forecast import forecast
from theodolite.forecasting.result import Forecast

__all__ = ["Forecast", "ForecastCheck", "check", "forecast"]
