#!/usr/bin/env bash
# Makes every golden file that a script can make, then the manifest. See README.md.
#   VLLM_WHEEL=… GPTQMODEL_SOURCE=… AUTOAWQ_SOURCE=… EXTRA_SITE=… CT11_SITE=… [PYTHON=python3] scripts/gen/run_all.sh
set -euo pipefail
cd "$(dirname "$0")"
: "${VLLM_WHEEL:?}" "${GPTQMODEL_SOURCE:?}" "${AUTOAWQ_SOURCE:?}" "${EXTRA_SITE:?}" "${CT11_SITE:?}"
python="${PYTHON:-python3}"
"$python" layouts.py --vllm-wheel "$VLLM_WHEEL"
PYTHONPATH="$EXTRA_SITE" "$python" gptq.py --gptqmodel-source "$GPTQMODEL_SOURCE" --vllm-wheel "$VLLM_WHEEL"
PYTHONPATH="$EXTRA_SITE" "$python" awq.py --autoawq-source "$AUTOAWQ_SOURCE" --vllm-wheel "$VLLM_WHEEL"
"$python" ct.py --vllm-wheel "$VLLM_WHEEL"
"$python" ct_methods.py --vllm-wheel "$VLLM_WHEEL"
PYTHONPATH="$CT11_SITE:$EXTRA_SITE" "$python" ct_actorder.py --vllm-wheel "$VLLM_WHEEL"
"$python" published.py --vllm-wheel "$VLLM_WHEEL"
"$python" manifest.py
