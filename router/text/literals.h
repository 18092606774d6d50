/* The fixed strings of the prompt encoders, byte for byte as the checkpoints were trained on them.
 *
 * They are macros so that sizes are known at compile time (DS4_STR).  A single changed byte changes the
 * model's input and every cached prefix: test_template_v4.c compares all of them with the published
 * strings.  The special tokens' texts are in vocab.h. */
#ifndef DS4_ROUTER_TEXT_LITERALS_H
#define DS4_ROUTER_TEXT_LITERALS_H

/* clang-format off */

/* V4, preview and 0731: tags without a space */
#define DS4_LIT_V4_TOOLS_BEFORE \
    "## Tools\n" \
    "\n" \
    "You have access to a set of tools to help answer the user's question. You can invoke tools by writing a \"<｜DSML｜tool_calls>\" block like the following:\n" \
    "\n" \
    "<｜DSML｜tool_calls>\n" \
    "<｜DSML｜invoke name=\"$TOOL_NAME\">\n" \
    "<｜DSML｜parameter name=\"$PARAMETER_NAME\" string=\"true|false\">$PARAMETER_VALUE</｜DSML｜parameter>\n" \
    "...\n" \
    "</｜DSML｜invoke>\n" \
    "<｜DSML｜invoke name=\"$TOOL_NAME2\">\n" \
    "...\n" \
    "</｜DSML｜invoke>\n" \
    "</｜DSML｜tool_calls>\n" \
    "\n" \
    "String parameters should be specified as is and set `string=\"true\"`. For all other types (numbers, booleans, arrays, objects), pass the value in JSON format and set `string=\"false\"`.\n" \
    "\n" \
    "If thinking_mode is enabled (triggered by <think>), you MUST output your complete reasoning inside <think>...</think> BEFORE any tool calls or final response.\n" \
    "\n" \
    "Otherwise, output directly after </think> with tool calls or final response.\n" \
    "\n" \
    "### Available Tool Schemas\n" \
    "\n"

#define DS4_LIT_V4_CALLS_OPEN "\n\n<｜DSML｜tool_calls>\n"
#define DS4_LIT_V4_CALLS_CLOSE "\n</｜DSML｜tool_calls>"
#define DS4_LIT_V4_INVOKE_CLOSE "\n</｜DSML｜invoke>"
/* then the name and DS4_LIT_INVOKE_OPEN_END */
#define DS4_LIT_V4_INVOKE_OPEN "<｜DSML｜invoke name=\""
#define DS4_LIT_V4_PARAM_OPEN "<｜DSML｜parameter name=\""
#define DS4_LIT_V4_PARAM_CLOSE "</｜DSML｜parameter>"

/* V4.1: tag names begin with a space */
#define DS4_LIT_V41_TOOLS_BEFORE \
    "## Tools\n" \
    "\n" \
    "You have access to a set of tools to help answer the user's question. You can invoke tools by writing a \"<｜DSML｜ calls>\" block like the following:\n" \
    "\n" \
    "<｜DSML｜ calls>\n" \
    "<｜DSML｜ invoke name=\"$TOOL_NAME\">\n" \
    "<｜DSML｜ parameter name=\"$PARAMETER_NAME\" string=\"true|false\">$PARAMETER_VALUE</｜DSML｜ parameter>\n" \
    "...\n" \
    "</｜DSML｜ invoke>\n" \
    "<｜DSML｜ invoke name=\"$TOOL_NAME2\">\n" \
    "...\n" \
    "</｜DSML｜ invoke>\n" \
    "</｜DSML｜ calls>\n" \
    "\n" \
    "String parameters should be specified as is and set `string=\"true\"`. For all other types (numbers, booleans, arrays, objects), pass the value in JSON format and set `string=\"false\"`.\n" \
    "\n" \
    "If thinking_mode is enabled (triggered by <think>), you MUST output your complete reasoning inside <think>...</think> BEFORE any tool calls or final response.\n" \
    "\n" \
    "Otherwise, output directly after </think> with tool calls or final response.\n" \
    "\n" \
    "### Available Tool Schemas\n" \
    "\n"

#define DS4_LIT_V41_CALLS_OPEN "\n\n<｜DSML｜ calls>\n"
#define DS4_LIT_V41_CALLS_CLOSE "\n</｜DSML｜ calls>"
#define DS4_LIT_V41_INVOKE_CLOSE "\n</｜DSML｜ invoke>"
#define DS4_LIT_V41_INVOKE_OPEN "<｜DSML｜ invoke name=\""
#define DS4_LIT_V41_PARAM_OPEN "<｜DSML｜ parameter name=\""
#define DS4_LIT_V41_PARAM_CLOSE "</｜DSML｜ parameter>"

/* All releases */
#define DS4_LIT_TOOLS_AFTER \
    "\n" \
    "\n" \
    "You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.\n"
#define DS4_LIT_SCHEMA_JOIN "\n"
#define DS4_LIT_INVOKE_OPEN_END "\">\n"
#define DS4_LIT_INVOKE_JOIN "\n"
/* between name and true or false */
#define DS4_LIT_PARAM_KIND "\" string=\""
#define DS4_LIT_PARAM_OPEN_END "\">"
#define DS4_LIT_PARAM_JOIN "\n"
#define DS4_LIT_TOOLS_JOIN "\n\n"
#define DS4_LIT_RESPONSE_FORMAT \
    "\n" \
    "\n" \
    "## Response Format:\n" \
    "\n" \
    "You MUST strictly adhere to the following schema to reply:\n"
#define DS4_LIT_RESULT_OPEN "<tool_result>"
#define DS4_LIT_RESULT_CLOSE "</tool_result>"
#define DS4_LIT_BLOCK_JOIN "\n\n"
/* then the type and "]" */
#define DS4_LIT_UNSUPPORTED_OPEN "[Unsupported "

/* Effort: the text of max in the preview and of high in 0731 */
#define DS4_LIT_EFFORT_THOROUGH \
    "Reasoning Effort: Absolute maximum with no shortcuts permitted.\n" \
    "You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve the root cause, rigorously stress-testing your logic against all potential paths, edge cases, and adversarial scenarios.\n" \
    "Explicitly write out your entire deliberation process, documenting every intermediate step, considered alternative, and rejected hypothesis to ensure absolutely no assumption is left unchecked.\n" \
    "\n"

#define DS4_LIT_EFFORT_0731_MAX \
    "Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.\n" \
    "You MUST reason with the utmost depth and rigor, leaving absolutely nothing to chance: exhaustively decompose the problem into its most fundamental components, trace every causal chain to its root, and resolve the underlying cause rather than any surface symptom.\n" \
    "Do not stop reasoning until you have independently verified the solution from multiple angles and are certain that no assumption remains unchecked and no error remains undiscovered.\n" \
    "\n"
/* V4.1: a printf format for the budget */
#define DS4_LIT_EFFORT_V41 \
    "Reasoning Effort: %d (range 1-100, the higher the value, the more thorough the reasoning)\n" \
    "\n"
/* Task tokens */
#define DS4_LIT_TASK_ACTION "<｜action｜>"
#define DS4_LIT_TASK_QUERY "<｜query｜>"
#define DS4_LIT_TASK_AUTHORITY "<｜authority｜>"
#define DS4_LIT_TASK_DOMAIN "<｜domain｜>"
#define DS4_LIT_TASK_TITLE "<｜title｜>"
#define DS4_LIT_TASK_READ_URL "<｜read_url｜>"

/* clang-format on */

#endif
