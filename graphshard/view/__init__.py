"""Draws plans: as rows (`timeline`), as one HTML file (`html`), as text (`text`). No torch."""
