"""The survey: which checks to run on a workload, and the findings they give."""

from theodolite.surveying.context import SurveyContext
from theodolite.surveying.finding import Check, Evidence, Finding
from theodolite.surveying.section import Section, find_sections
from theodolite.surveying.survey import Survey, survey

__all__ = ["Check", "Evidence", "Finding", "Section", "Survey", "SurveyContext", "find_sections", "survey"]
