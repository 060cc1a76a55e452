"""All attacks."""

from tests.attack import expansion as expansion
from tests.attack import generation as generation
from tests.attack import tenancy as tenancy
from tests.attack.frame import CASES as CASES
from tests.attack.frame import SYSTEMS as SYSTEMS
