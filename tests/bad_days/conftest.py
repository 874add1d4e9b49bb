"""Bad days need both stages: a user in front of the command line, and a dispatcher with a fleet of fake agents."""



from tests.support.cli.cli_user import up, user  # noqa: F401
from tests.support.dispatcher.scenes import play  # noqa: F401
