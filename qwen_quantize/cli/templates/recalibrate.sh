qwen_quantize probe --on "$DEVICE" --fingerprint fingerprint.json
qwen_quantize regress "$MODEL" --before "${BEFORE:-$MODEL}" --after fingerprint.json ${HELDOUT:+--text "$HELDOUT"} --max-tokens "$TOKENS" --recalibrate "$MODEL.new" ${CALIBRATION:+--calibration-dataset "$CALIBRATION"} || test $? -eq 1
test -d "$MODEL.new" || exit 0
qwen_quantize compare "$MODEL" "$MODEL.new" --by size --html compare.html
cp "$MODEL.new/report.html" report.html
qwen_quantize regress "$MODEL.new" --before "$MODEL.new" --after fingerprint.json ${HELDOUT:+--text "$HELDOUT"} --max-tokens "$TOKENS" --junit regress.xml
