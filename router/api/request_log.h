/* One line per finished choice: who, how it ended, how many tokens, where the time went. */
#ifndef DS4_ROUTER_API_REQUEST_LOG_H
#define DS4_ROUTER_API_REQUEST_LOG_H

struct ds4_choice;

/* Writes "request.done", or "request.slow" as a warning when the first token or the end came later than
 * log.slow_first_s or log.slow_total_s allow.  Times in milliseconds, -1 where a phase was not reached;
 * never text of prompt or answer, never a key. */
void ds4_request_log(const struct ds4_choice *choice);

#endif
