"""python -m teamtr_lora.cli"""

import sys

from teamtr_lora.cli import main

sys.exit(main())
