"""The report of an audit, and its four forms: data (``--json``), a table, a page (``--html``) and SARIF."""
