"""Chapter 12. What counts as a number in a text: a whole number, a decimal or a fraction, with its sign.

    a whole number       72      007      1,234,567 (a comma in front of every three digits, or none)
    a decimal            0.5     .5       1,234.50          at least one digit follows the point
    a fraction           3/4     of two whole numbers, without spaces

All in ASCII digits; a `-` or `+` directly before them belongs to the number. A number, with its sign, does not begin directly behind a
letter, a digit or an underscore of any script: there is none in `v2`, and no sign in `10-7`, whose last number is 7. What follows ends
it: the full stop of a sentence, the unit in `72km`. A text is read from left to right, each number as long as it can be: `1.2.3` holds
1.2 and 3, and `1,2345` holds 1 and 2345, because exactly three digits stand behind a comma.
"""

import re

WHOLE = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
NUMBER = re.compile(rf"(?:(?<!\w)[-+])?(?<!\w)(?:{WHOLE}/{WHOLE}|{WHOLE}?\.[0-9]+|{WHOLE})")  # alternatives: the longer forms first
