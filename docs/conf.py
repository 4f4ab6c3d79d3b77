"""The site: `sphinx-build -W docs build/site`. Nothing is run: notebooks show what is
stored in them, which `tests/test_notebooks.py` compares with a fresh run."""

project = "spec_jax"
copyright = "The spec_jax authors"
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = "spec_jax"
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#00694b"},
    "dark_css_variables": {"color-brand-primary": "#5bd6ae"},
}

nb_execution_mode = "off"
myst_heading_anchors = 3

default_role = "code"  # docstrings write names in single backquotes
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 80
python_use_unqualified_type_names = True
add_module_names = False


def _docstring(app, what, name, obj, options, lines):
    """Keeps napoleon from reading "summary: rest" of an attribute as its type, and
    docutils from reading "<|" as a substitution."""
    lines[:] = [line.replace("<|", r"<\|") for line in lines]
    if what in ("attribute", "property"):
        lines.insert(0, "\\")  # An escaped end of line, which shows nothing.


def _signature(app, what, name, obj, options, signature, returned):
    """Shortens names of arrays."""
    short = lambda text: text and text.replace("jaxlib._jax.Array", "Array")
    return short(signature), short(returned)


def setup(app):
    app.connect("autodoc-process-docstring", _docstring, priority=100)  # first
    app.connect("autodoc-process-signature", _signature)
