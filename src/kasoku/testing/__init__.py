"""The contracts that kasoku's own techniques, data sources and reducers pass, for yours: one row each, run by pytest.

class TestMine(TechniqueContracts):
    rows = [Row(MyTechnique(strength=0.5), neutral=MyTechnique(strength=0.0))]
"""

from kasoku.testing.contracts import Contracts  # first: it has pytest explain the asserts of the others
from kasoku.testing.reducer_contracts import ReducerContracts, ReducerRow
from kasoku.testing.source_contracts import SourceContracts, SourceRow
from kasoku.testing.technique_contracts import Row, TechniqueContracts

__all__ = ["Contracts", "ReducerContracts", "ReducerRow", "Row", "SourceContracts", "SourceRow", "TechniqueContracts"]
