"""Word lists that the tasks draw from."""

from __future__ import annotations


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NOUNS = _words("""apple bread cheese lemon onion pepper potato tomato melon cherry
    tree flower river mountain bridge table chair window mirror carpet bottle basket
    candle pencil hammer train rocket bicycle tractor wagon ticket jacket button
    pocket ribbon blanket pillow summer winter shadow planet guitar violin trumpet
    piano camera clock lantern needle ladder paper letter book story number""")
ANIMALS = _words("fox owl bear cat dog wolf duck frog mouse goat crow deer")
NAMES = _words("""
    Anna Ben Clara David Emma Felix Grace Hugo Iris Jack Karen Leo Maria Noah
    Olga Peter Quinn Rosa Simon Tina Victor Wendy Xavier Yuki Zara Omar Lucy Ivan
    Nina Paul""")
CITIES = _words("""
    Paris London Rome Madrid Berlin Vienna Oslo Lisbon Athens Dublin Warsaw
    Prague Cairo Tokyo Lima Ottawa""")
COLORS = _words("red blue green yellow black white orange purple pink brown")
ADJECTIVES = _words(
    "old tiny brave quiet happy clever lazy golden strange gentle hungry proud"
)
PLACES = _words("""
    forest castle village harbor garden desert valley meadow kitchen market
    library island""")
WEEKDAYS = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = _words("""January February March April May June July August September October
    November December""")
MONTH_DAYS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
CAPITALS = {
    "France": "Paris",
    "England": "London",
    "Italy": "Rome",
    "Spain": "Madrid",
    "Germany": "Berlin",
    "Austria": "Vienna",
    "Norway": "Oslo",
    "Portugal": "Lisbon",
    "Greece": "Athens",
    "Ireland": "Dublin",
    "Poland": "Warsaw",
    "Egypt": "Cairo",
    "Japan": "Tokyo",
    "Peru": "Lima",
    "Canada": "Ottawa",
    "Sweden": "Stockholm",
    "Finland": "Helsinki",
    "Denmark": "Copenhagen",
    "Belgium": "Brussels",
    "Hungary": "Budapest",
    "Kenya": "Nairobi",
    "Cuba": "Havana",
    "Russia": "Moscow",
    "China": "Beijing",
}
