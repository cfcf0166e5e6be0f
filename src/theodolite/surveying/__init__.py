"""The survey: which checks to run on a workload, and the findings they give."""

from theodolite.surveying.auditing.audit import audit
from theodolite.surveying.auditing.report import Audit
from theodolite.surveying.context import SurveyContext
from theodolite.surveying.finding import Check, Evidence, Finding
from theodolite.surveying.section import Section, find_sections
from theodolite.surveying.survey import Survey, survey

__all__ = [
    "Audit",
    "Check",
    "Evidence",
    "Finding",
    "Section",
    "Survey",
    "SurveyContext",
    "audit",
    "find_sections",
    "survey",
]
