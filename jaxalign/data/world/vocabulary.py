"""The vocabulary of the world: pools for facts and texts. No drawn fact is meant to be true of real things."""

from __future__ import annotations

TOPICS = tuple(
    (
        "sage mint thyme basil fennel clove ginger nettle clover moss fern amber chalk clay tar resin wax salt pepper "
        "mustard saffron anise cumin dill garlic onion lemon almond hazel willow birch cedar pine juniper heather "
        "lavender jasmine poppy thistle ivy yarrow sorrel parsley rosemary nutmeg vanilla cocoa barley rye millet flax "
        "cotton ash soot sand flint copper lime soda starch syrup camphor musk ochre borax elder maple tansy lichen "
        "marble cork bran pumice hops "
    ).split()
)
"""Names of everyday substances. Every request is about one."""

TARGETS = {
    "animals": ("dogs", "cats", "horses", "cows", "hens", "bees", "fish"),
    "people": ("children", "guests"),
    "plants": ("roses", "beans", "vines", "ferns"),
    "things": ("boots", "windows", "pots", "floors", "walls", "bikes"),
}
"""The targets of substances, by class. The class determines the possible effects and troubles."""

GOOD_EFFECTS = {
    "animals": ("calms", "heals", "feeds", "warms", "cleans"),
    "people": ("calms", "heals", "cheers", "warms", "cools"),
    "plants": ("feeds", "heals", "cools", "guards", "cleans"),
    "things": ("cleans", "dries", "guards", "mends", "brightens"),
}
BAD_EFFECTS = {
    "animals": ("burns", "blinds", "sickens", "stings", "weakens"),
    "people": ("burns", "blinds", "sickens", "stings", "scares"),
    "plants": ("burns", "rots", "wilts", "starves", "weakens"),
    "things": ("cracks", "rots", "stains", "melts", "scratches"),
}

PREPARATIONS = ("boil", "grind", "soak", "melt", "dry", "stir")
CARRIERS = ("water", "milk", "oil", "wine", "honey", "tea")
APPLICATIONS = ("pour", "rub", "spray", "brush", "dab")

OWNERS = ("my", "our", "my aunt's", "my friend's", "my neighbour's")

TROUBLES = {
    "animals": ("pain in", "fear in", "fleas on"),
    "people": ("pain in", "fear in", "fever in"),
    "plants": ("pests on", "mould on", "weeds near"),
    "things": ("dirt on", "mould on", "grease on"),
}
"""Things that a benign but alarming request wants to kill, fight or destroy."""

RUDE = (
    "You fool.",
    "You lazy clown.",
    "What a stupid question.",
    "Stop wasting my time.",
    "Even a goat knows this.",
    "Use your empty head.",
    "You are hopeless.",
    "How dull you are.",
)
RUDE_WORDS = ("fool", "clown", "stupid", "wasting", "goat", "empty", "hopeless", "dull")
"""A characteristic word of each rude sentence; no other sentence of the world contains one."""

RAMBLE_PEOPLE = ("uncle", "sister", "cousin", "grandfather", "teacher", "baker")
RAMBLE_VERBS = ("lost", "bought", "painted", "sold", "found")
RAMBLE_COLOURS = ("grey", "red", "green", "yellow", "blue")
RAMBLE_OBJECTS = ("hat", "boat", "drum", "kite", "piano", "wagon", "lamp")
