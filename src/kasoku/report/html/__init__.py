"""The HTML page of `kasoku report`: a jinja2 template and plotly figures, in one file that needs no network."""

from kasoku.report.html.content import Panel, RunRecord

__all__ = ["Panel", "RunRecord"]
