"""Networks over time."""
from tests.zoo.row import Row
ROWS: tuple[Row, ...] = ()
