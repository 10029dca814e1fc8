qwen_quantize probe --on "$DEVICE" --fingerprint fingerprint.json
qwen_quantize eval "$MODEL" --against "$REFERENCE" ${HELDOUT:+--text "$HELDOUT"} --max-tokens "$TOKENS" --json > eval.json
qwen_quantize compare "$MODEL" eval.json --by size --html compare.html
qwen_quantize report "$MODEL" > report.txt
cp "$MODEL/report.html" report.html
qwen_quantize regress "$MODEL" --before "${BEFORE:-$MODEL}" --after fingerprint.json ${HELDOUT:+--text "$HELDOUT"} --max-tokens "$TOKENS" --junit regress.xml
