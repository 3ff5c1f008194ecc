"""ferrorpc comes first: it sets what gRPC reads when it is imported, and tests import gRPC in any order."""

import ferrorpc

assert ferrorpc.__all__
