"""The HTML page of `kasoku report`: a jinja2 template and plotly figures, in one file that needs no network."""

from kasoku.report.html.content import Panel, RunRecord, read_run, read_table

__all__ = ["Panel", "RunRecord", "read_run", "read_table"]
