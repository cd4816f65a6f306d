"""The words that generated problems are made of: people, things, places.

Why a closed vocabulary: a 14M-parameter model that sees about ten million tokens should spend them
on copying and on arithmetic, not on rare names. Variety comes from combining short lists, so that
no question is likely to repeat while every single word is seen thousands of times.
"""

from dataclasses import dataclass
from random import Random

FEMALE_NAMES = (
    "Anna",
    "Maria",
    "Lily",
    "Emma",
    "Sara",
    "Nina",
    "Julia",
    "Clara",
    "Grace",
    "Ella",
    "Mia",
    "Zoe",
    "Ruth",
    "Tina",
    "Olivia",
    "Kate",
    "Rosa",
    "Hannah",
    "Leah",
    "Amy",
    "Priya",
    "Mei",
    "Fatima",
    "Ingrid",
)
MALE_NAMES = (
    "Tom",
    "Ben",
    "Sam",
    "Jack",
    "Leo",
    "Max",
    "David",
    "Paul",
    "Mark",
    "Peter",
    "Adam",
    "Luke",
    "Omar",
    "Noah",
    "Eric",
    "James",
    "Carlos",
    "Ryan",
    "Ivan",
    "Hugo",
    "Ravi",
    "Chen",
    "Ali",
    "Lars",
)

THINGS = (
    "apples",
    "pencils",
    "marbles",
    "stickers",
    "books",
    "coins",
    "shells",
    "cookies",
    "oranges",
    "cards",
    "balloons",
    "stamps",
    "buttons",
    "toys",
    "flowers",
    "candies",
    "eggs",
    "beads",
    "crayons",
    "stones",
    "muffins",
    "lemons",
    "peaches",
    "ribbons",
    "badges",
    "tickets",
    "photos",
    "blocks",
    "keys",
    "plums",
)
GOODS = (
    ("shirt", "shirts"),
    ("hat", "hats"),
    ("book", "books"),
    ("toy", "toys"),
    ("cake", "cakes"),
    ("pen", "pens"),
    ("ball", "balls"),
    ("lamp", "lamps"),
    ("cup", "cups"),
    ("bag", "bags"),
    ("plate", "plates"),
    ("chair", "chairs"),
    ("scarf", "scarves"),
    ("puzzle", "puzzles"),
    ("notebook", "notebooks"),
    ("game", "games"),
    ("plant", "plants"),
    ("ticket", "tickets"),
    ("sandwich", "sandwiches"),
    ("juice", "juices"),
)
CONTAINERS = (
    ("box", "boxes"),
    ("bag", "bags"),
    ("jar", "jars"),
    ("basket", "baskets"),
    ("tray", "trays"),
    ("shelf", "shelves"),
    ("packet", "packets"),
    ("drawer", "drawers"),
)
COLOURS = ("red", "blue", "green", "yellow", "white", "black", "purple", "orange", "pink", "brown")
ANIMALS = ("cows", "sheep", "goats", "hens", "ducks", "horses", "pigs", "rabbits", "geese", "dogs")
PLACES = ("park", "zoo", "school", "library", "farm", "market", "museum", "garden", "club", "camp")
TREES = ("apple", "pear", "plum", "lemon", "cherry", "peach", "olive", "fig")


@dataclass(frozen=True)
class Person:
    name: str
    he: str  # subject pronoun, lower case

    @property
    def He(self) -> str:  # noqa: N802  the capitalised pronoun, as it reads in a template
        return self.he.capitalize()


def people(rng: Random, count: int) -> list[Person]:
    """`count` different people, at most one list's length of them."""
    everyone = [Person(name, "she") for name in FEMALE_NAMES] + [
        Person(name, "he") for name in MALE_NAMES
    ]
    return rng.sample(everyone, count)
