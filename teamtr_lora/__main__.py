"""python -m teamtr_lora"""

import sys

from teamtr_lora.cli import main

sys.exit(main())
