"""A comparison, or one run, as a single HTML file that needs nothing else.

Run folders come from anybody, so every value in them is hostile text: the template engine escapes
it, ``page`` makes what is invisible visible, and the page's own policy forbids everything that is
not in the file. No function here builds HTML from values by hand.
"""
