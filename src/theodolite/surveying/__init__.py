"""Which checks to run on a workload, and the findings they give."""

from theodolite.surveying.finding import Evidence, Finding
from theodolite.surveying.section import Section, find_sections
from theodolite.surveying.site import Site
from theodolite.surveying.survey import Survey, survey

__all__ = ["Evidence", "Finding", "Section", "Site", "Survey", "find_sections", "survey"]
