"""The page: one HTML file with a profile, its plans, an explanation, and what shows them.

```
Profile, Plans, Explanation ─document─▶ JSON ─html─▶ one file
```

`document.py` makes the JSON, of which `plans.py` and `explained.py` are parts; `html.py` puts it
into the template beside the style and the scripts in `assets/`; `write.py` does it when `report` is
called.
"""
