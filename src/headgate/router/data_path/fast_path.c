// The router's fast path in C. `fast_path.py` has the same functions in Python with their documentation, and is used where
// there is no compiler. Functions return None for unusual input, which takes the general path.
#define PY_SSIZE_T_CLEAN
#define _GNU_SOURCE
#include <Python.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <structmember.h>

// The part of the journal's grammar that is read here. `contract/journal.py` declares it; a test compares the two.
#define JOURNAL_PROMPT ":p "
#define JOURNAL_TOKENS ":j "
#define JOURNAL_FINISH ":f "
#define JOURNAL_FAILURE ":e "
#define JOURNAL_WITHHELD ":m "
#define JOURNAL_BOUND ":+\n"
#define JOURNAL_DATA "data: "
#define JOURNAL_DONE "[DONE]"
#define JOURNAL_MESSAGE_STOP "event: message_stop\n"
#define JOURNAL_GAP "\n\n"
#define JOURNAL_VERSION_DIGITS 18
#define JOURNAL_COUNT_DIGITS 12
#define JOURNAL_ID_DIGITS 9

typedef struct {
    const char *at, *end;
} Span;

static Span span_of(PyObject *bytes) {
    const char *at = PyBytes_AS_STRING(bytes);
    return (Span){at, at + PyBytes_GET_SIZE(bytes)};
}

static const char *find(const char *at, const char *end, const char *what, size_t size) {
    return at < end ? memmem(at, (size_t)(end - at), what, size) : NULL;
}

static int starts(const char *at, const char *end, const char *with, size_t size) {
    return (size_t)(end - at) >= size && memcmp(at, with, size) == 0;
}

static int ends(Span data, const char *with, size_t size) {
    return (size_t)(data.end - data.at) >= size && memcmp(data.end - size, with, size) == 0;
}

#define FIND(at, end, what) find(at, end, what, sizeof(what) - 1)
#define STARTS(at, end, with) starts(at, end, with, sizeof(with) - 1)
#define ENDS(data, with) ends(data, with, sizeof(with) - 1)

// Whether there are `wanted` arguments and the given one is bytes.
static int arguments(const char *name, PyObject *const *args, Py_ssize_t given, Py_ssize_t wanted, int bytes) {
    if (given == wanted && PyBytes_CheckExact(args[bytes])) return 1;
    PyErr_Format(PyExc_TypeError, "%s takes %zd arguments, and bytes among them", name, wanted);
    return 0;
}

static PyObject *bytes_of(const char *at, const char *end) { return PyBytes_FromStringAndSize(at, end - at); }

// A tuple of both; steals the references. NULL if the second is NULL.
static PyObject *pair(PyObject *known, PyObject *made) {
    PyObject *both = made == NULL ? NULL : PyTuple_Pack(2, known, made);
    Py_DECREF(known);
    Py_XDECREF(made);
    return both;
}

// The value in `heads` for these bytes without those between `from` and `to`. A new reference, because a later allocation
// may run other code that empties `heads`. NULL without an error if there is none.
static PyObject *known_head(PyObject *heads, const char *at, const char *from, const char *to, const char *end) {
    PyObject *key = PyBytes_FromStringAndSize(NULL, (from - at) + (end - to));
    if (key == NULL) return NULL;
    memcpy(PyBytes_AS_STRING(key), at, (size_t)(from - at));
    memcpy(PyBytes_AS_STRING(key) + (from - at), to, (size_t)(end - to));
    PyObject *found = PyDict_GetItemWithError(heads, key);
    Py_XINCREF(found);
    Py_DECREF(key);
    return found;
}

// ------------------------------------------------------------------------------------------------------ HTTP

// Finds the content-length line, with the line break before it, and its number; 0 if there is none.
static int length_line(const char *at, const char *end, Span *line, Py_ssize_t *length) {
    for (const char *gap = at; (gap = FIND(gap, end, "\r\n")) != NULL; gap += 2) {
        const char *name = gap + 2;
        if (end - name < 19 || (name[0] | 32) != 'c' || (name[8] | 32) != 'l') continue;
        if (memcmp(name + 1, "ontent-", 7) || memcmp(name + 9, "ength: ", 7)) continue;
        const char *digit = name + 16, *first = digit;
        Py_ssize_t number = 0;
        while (digit < end && digit - first < 12 && *digit >= '0' && *digit <= '9') number = 10 * number + (*digit++ - '0');
        if (digit == first || !STARTS(digit, end, "\r\n")) continue;
        *line = (Span){gap, digit};
        *length = number;
        return 1;
    }
    return 0;
}

static PyObject *request(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    if (!arguments("request", args, count, 3, 0)) return NULL;
    Span data = span_of(args[0]), line;
    Py_ssize_t length, most = PyLong_AsSsize_t(args[2]);
    if (most == -1 && PyErr_Occurred()) return NULL;
    const char *gap = FIND(data.at, data.end, "\r\n\r\n");
    if (gap == NULL || !length_line(data.at, gap + 2, &line, &length)) Py_RETURN_NONE;
    const char *body = gap + 4;
    if (length != data.end - body || length > most) Py_RETURN_NONE;
    PyObject *head = known_head(args[1], data.at, line.at, line.end, gap + 2);
    if (head == NULL) {
        if (PyErr_Occurred()) return NULL;
        Py_RETURN_NONE;
    }
    return pair(head, bytes_of(body, data.end));
}

// The chunk that begins at `at`, and the start of the next one; 0 if the chunk is incomplete or empty.
static int chunk(const char *at, const char *end, Span *content, const char **next) {
    Py_ssize_t size = 0;
    const char *first = at;
    for (; at < end && at - first < 8; at++) {
        char c = *at;
        int digit = c >= '0' && c <= '9' ? c - '0' : (c | 32) >= 'a' && (c | 32) <= 'f' ? (c | 32) - 'a' + 10 : -1;
        if (digit < 0) break;
        size = 16 * size + digit;
    }
    if (at == first || !STARTS(at, end, "\r\n")) return 0;
    at += 2;
    if (size == 0 || end - at < size + 2 || memcmp(at + size, "\r\n", 2)) return 0;
    *content = (Span){at, at + size};
    *next = at + size + 2;
    return 1;
}

// The content of the chunks that fill the span, as a new reference; None if the span is anything else.
static PyObject *unchunked(const char *at, const char *end) {
    Span content;
    Py_ssize_t size = 0;
    const char *start = at;
    for (; at < end; size += content.end - content.at)
        if (!chunk(at, end, &content, &at)) Py_RETURN_NONE;
    if (size == 0) Py_RETURN_NONE;
    PyObject *all = PyBytes_FromStringAndSize(NULL, size);
    if (all == NULL) return NULL;
    char *to = PyBytes_AS_STRING(all);
    for (at = start; at < end && chunk(at, end, &content, &at); to += content.end - content.at)
        memcpy(to, content.at, (size_t)(content.end - content.at));
    return all;
}

// Whether these are whole events, none of them bound to the next or withheld.
static int are_plain(Span events) {
    if (!ENDS(events, JOURNAL_GAP) || FIND(events.at, events.end, JOURNAL_BOUND)) return 0;
    return !FIND(events.at, events.end, JOURNAL_WITHHELD);
}

static PyObject *answer(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    if (!arguments("answer", args, count, 2, 0)) return NULL;
    Span data = span_of(args[0]);
    const char *gap = FIND(data.at, data.end, "\r\n\r\n");
    if (gap == NULL || !ENDS(data, "0\r\n\r\n") || data.end - gap < 9) Py_RETURN_NONE;
    const char *id = FIND(data.at, gap, "\r\nx-request-id: ");
    const char *from = id == NULL ? gap : id;
    const char *to = id == NULL ? gap : FIND(id + 2, gap + 2, "\r\n");
    PyObject *headers = known_head(args[1], data.at, from, to, gap);
    if (headers == NULL) {
        if (PyErr_Occurred()) return NULL;
        Py_RETURN_NONE;
    }
    PyObject *body = unchunked(gap + 4, data.end - 5);
    if (body == NULL || (body != Py_None && are_plain(span_of(body)))) return pair(headers, body);
    Py_DECREF(headers);
    Py_DECREF(body);
    Py_RETURN_NONE;
}

// The position after a number of 1 to `most` digits; NULL if there is none, or `at` is NULL.
static const char *digits(const char *at, const char *end, int most, long long *number) {
    const char *first = at;
    if (at == NULL) return NULL;
    for (*number = 0; at < end && at - first < most && *at >= '0' && *at <= '9'; at++) *number = 10 * *number + (*at - '0');
    return at > first ? at : NULL;
}

// The position after one or more letters, digits and underscores; NULL if there are none, or `at` is NULL.
static const char *word_of(const char *at, const char *end) {
    const char *first = at;
    if (at == NULL) return NULL;
    while (at < end && (((*at | 32) >= 'a' && (*at | 32) <= 'z') || (*at >= '0' && *at <= '9') || *at == '_')) at++;
    return at > first ? at : NULL;
}

static const char *space(const char *at, const char *end) {
    return at != NULL && at < end && *at == ' ' ? at + 1 : NULL;
}

// Whether this is a complete prompt line: `:p TOKENS`.
static int prompt_line(const char *at, const char *end) {
    long long other;
    if (!STARTS(at, end, JOURNAL_PROMPT)) return 0;
    return digits(at + sizeof(JOURNAL_PROMPT) - 1, end, JOURNAL_COUNT_DIGITS, &other) == end;
}

// Whether this is a complete tokens line of the first choice: `:j 0 VERSION CHARS ID,ID`.
static int tokens_line(const char *at, const char *end, long long *version) {
    long long other;
    if (!STARTS(at, end, JOURNAL_TOKENS "0 ")) return 0;
    at = space(digits(at + sizeof(JOURNAL_TOKENS "0 ") - 1, end, JOURNAL_VERSION_DIGITS, version), end);
    at = space(digits(at, end, JOURNAL_COUNT_DIGITS, &other), end);
    for (int more = at != NULL && at < end; more; at += more) {
        if ((at = digits(at, end, JOURNAL_ID_DIGITS, &other)) == NULL) return 0;
        more = at < end && *at == ',';
    }
    return at == end;
}

// Whether this is a complete finish line of the first choice: `:f 0 REASON CAUSE PROMPT CACHED OUTPUT`.
static int finish_line(const char *at, const char *end, long long *prompt, long long *cached) {
    long long other;
    if (!STARTS(at, end, JOURNAL_FINISH "0 ")) return 0;
    at = space(word_of(at + sizeof(JOURNAL_FINISH "0 ") - 1, end), end);
    at = space(word_of(at, end), end);
    at = space(digits(at, end, JOURNAL_COUNT_DIGITS, prompt), end);
    at = space(digits(at, end, JOURNAL_COUNT_DIGITS, cached), end);
    return digits(at, end, JOURNAL_COUNT_DIGITS, &other) == end;
}

static PyObject *read_whole(PyObject *module, PyObject *events) {
    if (!arguments("read_whole", &events, 1, 1, 0)) return NULL;
    Span all = span_of(events), answer = {NULL, NULL};
    long long version = -1, prompt = -1, cached = -1, other;
    if (!ENDS(all, JOURNAL_GAP)) Py_RETURN_NONE;
    for (const char *at = all.at, *end; at < all.end; at = end + 1) {
        end = memchr(at, '\n', (size_t)(all.end - at));
        if (end == at || tokens_line(at, end, version < 0 ? &version : &other)) continue;
        if (prompt < 0 && finish_line(at, end, &prompt, &cached)) continue;
        if (prompt_line(at, end)) continue;
        if (answer.at != NULL || !STARTS(at, end, JOURNAL_DATA)) Py_RETURN_NONE;
        answer = (Span){at + sizeof(JOURNAL_DATA) - 1, end};
    }
    if (version < 0 || prompt < 0 || answer.at == NULL) Py_RETURN_NONE;
    return Py_BuildValue("(LLLN)", version, prompt, cached, bytes_of(answer.at, answer.end));
}

// ----------------------------------------------------------------------------------------------------- streams

typedef struct {
    PyObject_HEAD
    PyObject *raw, *read, *writes, *queue, *transport, *write, *is_closing;
    Py_ssize_t kept, most_kept;
    char heard;
} Pipe;

static int pipe_traverse(Pipe *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->raw);
    Py_VISIT(self->read);
    Py_VISIT(self->writes);
    Py_VISIT(self->queue);
    Py_VISIT(self->transport);
    Py_VISIT(self->write);
    Py_VISIT(self->is_closing);
    return 0;
}

static int pipe_clear(Pipe *self) {
    Py_CLEAR(self->raw);
    Py_CLEAR(self->read);
    Py_CLEAR(self->writes);
    Py_CLEAR(self->queue);
    Py_CLEAR(self->transport);
    Py_CLEAR(self->write);
    Py_CLEAR(self->is_closing);
    return 0;
}

static void pipe_dealloc(Pipe *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    pipe_clear(self);
    type->tp_free(self);
    Py_DECREF(type);
}

static Py_ssize_t number_of(PyObject *owner, const char *name) {
    PyObject *number = PyObject_GetAttrString(owner, name);
    Py_ssize_t size = number == NULL ? -1 : PyLong_AsSsize_t(number);
    Py_XDECREF(number);
    return size;
}

// Reads the ends of a pipe; -1 with an error if an argument is invalid. The caller clears the fields in any case.
static int pipe_find(Pipe *found, PyObject *journal, PyObject *outbox, PyObject *transport) {
    found->transport = Py_NewRef(transport);
    if ((found->raw = PyObject_GetAttrString(journal, "raw")) == NULL) return -1;
    if ((found->read = PyObject_GetAttrString(journal, "read")) == NULL) return -1;
    if ((found->most_kept = number_of(journal, "KEPT_BYTES")) == -1 && PyErr_Occurred()) return -1;
    if ((found->writes = PyObject_GetAttrString(outbox, "writes")) == NULL) return -1;
    if ((found->queue = PyObject_GetAttrString(outbox, "write")) == NULL) return -1;
    if ((found->write = PyObject_GetAttrString(transport, "write")) == NULL) return -1;
    if ((found->is_closing = PyObject_GetAttrString(transport, "is_closing")) == NULL) return -1;
    if (PyList_CheckExact(found->raw) && PyDict_CheckExact(found->writes)) return 0;
    PyErr_SetString(PyExc_TypeError, "a journal keeps a list, and an outbox a dict");
    return -1;
}

// Fields are set once, all together: a pipe has either no ends, or ends that live as long as the pipe.
static int pipe_init(Pipe *self, PyObject *args, PyObject *named) {
    static char *names[] = {"journal", "outbox", "transport", NULL};
    PyObject *journal, *outbox, *transport;
    if (!PyArg_ParseTupleAndKeywords(args, named, "OOO:Pipe", names, &journal, &outbox, &transport)) return -1;
    Pipe found = {0};
    int failed = pipe_find(&found, journal, outbox, transport);
    if (!failed && self->raw != NULL) {
        PyErr_SetString(PyExc_RuntimeError, "this pipe leads somewhere already");
        failed = -1;
    }
    if (failed) {
        pipe_clear(&found);
        return -1;
    }
    self->raw = found.raw, self->read = found.read, self->most_kept = found.most_kept;
    self->writes = found.writes, self->queue = found.queue;
    self->transport = found.transport, self->write = found.write, self->is_closing = found.is_closing;
    return 0;
}

static int pipe_keep(Pipe *self, Span content) {
    PyObject *events = bytes_of(content.at, content.end);
    if (events == NULL || PyList_Append(self->raw, events) < 0) {
        Py_XDECREF(events);
        return -1;
    }
    Py_DECREF(events);
    self->kept += content.end - content.at;
    if (self->kept <= self->most_kept) return 0;
    self->kept = 0;
    PyObject *done = PyObject_CallNoArgs(self->read);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

static PyObject *pipe_write(Pipe *self, PyObject *data) {
    int waits = PyDict_GET_SIZE(self->writes) > 0 ? PyDict_Contains(self->writes, self->transport) : 0;
    if (waits < 0) return NULL;
    if (waits) return PyObject_CallFunctionObjArgs(self->queue, self->transport, data, NULL);
    PyObject *closing = PyObject_CallNoArgs(self->is_closing);
    int closes = closing == NULL ? -1 : PyObject_IsTrue(closing);
    if (closes == 0) Py_SETREF(closing, PyObject_CallOneArg(self->write, data));
    if (closes < 0) Py_CLEAR(closing);
    return closing;
}

static int pipe_send(Pipe *self, PyObject *data) {
    PyObject *done = pipe_write(self, data);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

static PyObject *pipe_take(Pipe *self, PyObject *data) {
    if (!arguments("take", &data, 1, 1, 0)) return NULL;
    if (self->raw == NULL) return PyErr_Format(PyExc_ValueError, "this pipe leads nowhere");
    Span framed = span_of(data), content;
    const char *next;
    if (!chunk(framed.at, framed.end, &content, &next) || next != framed.end || !are_plain(content)) Py_RETURN_FALSE;
    if (FIND(content.at, content.end, JOURNAL_DONE) || FIND(content.at, content.end, JOURNAL_FAILURE)) Py_RETURN_FALSE;
    if (FIND(content.at, content.end, JOURNAL_MESSAGE_STOP)) Py_RETURN_FALSE;
    if (pipe_keep(self, content) < 0 || pipe_send(self, data) < 0) return NULL;
    self->heard = 1;
    Py_RETURN_TRUE;
}

static PyMethodDef PIPE_METHODS[] = {{"take", (PyCFunction)pipe_take, METH_O, NULL}, {NULL, NULL, 0, NULL}};
static PyMemberDef PIPE_MEMBERS[] = {{"heard", T_BOOL, offsetof(Pipe, heard), 0, NULL}, {NULL, 0, 0, 0, NULL}};
static PyType_Slot PIPE_SLOTS[] = {
    {Py_tp_new, PyType_GenericNew},     {Py_tp_init, pipe_init},       {Py_tp_dealloc, pipe_dealloc},
    {Py_tp_traverse, pipe_traverse},    {Py_tp_clear, pipe_clear},     {Py_tp_methods, PIPE_METHODS},
    {Py_tp_members, PIPE_MEMBERS},      {0, NULL},
};
static PyType_Spec PIPE = {"_headgate_fast_path.Pipe", sizeof(Pipe), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, PIPE_SLOTS};

// ------------------------------------------------------------------------------------------------------ JSON

static const char *blank(const char *at, const char *end) {
    while (at < end && (*at == ' ' || *at == '\n' || *at == '\r' || *at == '\t')) at++;
    return at;
}

// From an opening quote to the position after the closing one; NULL if there is none.
static const char *string(const char *at, const char *end) {
    const char *first = ++at;
    while (at < end && (at = memchr(at, '"', (size_t)(end - at))) != NULL) {
        const char *slash = at;
        while (slash > first && slash[-1] == '\\') slash--;
        if (((at - slash) & 1) == 0) return at + 1;
        first = ++at;
    }
    return NULL;
}

#define DEEPEST 63

// From the start of a value to the position after its end; NULL if it is incomplete, malformed or nested too deeply.
static const char *value(const char *at, const char *end) {
    uint64_t objects = 0;  // one bit per open bracket: 1 for an object, 0 for a list
    int depth = 0;
    const char *first = at;
    while (at < end) {
        switch (*at) {
            case '"':
                if ((at = string(at, end)) == NULL) return NULL;
                if (depth == 0) return at;
                continue;
            case '{':
            case '[':
                if (++depth > DEEPEST) return NULL;
                objects = objects << 1 | (*at++ == '{');
                continue;
            case '}':
            case ']':
                if (depth == 0) return at > first ? at : NULL;
                if ((objects & 1) != (*at++ == '}')) return NULL;
                objects >>= 1;
                if (--depth == 0) return at;
                continue;
            case ',':
            case ' ':
            case '\n':
            case '\r':
            case '\t':
                if (depth == 0) return at > first ? at : NULL;
        }
        at++;
    }
    return NULL;
}

static int is(Span what, const char *text) {
    size_t size = strlen(text);
    return (size_t)(what.end - what.at) == size && memcmp(what.at, text, size) == 0;
}

typedef enum { OTHER, MODEL, STREAM, PROMPT, RARE } Field;

static const struct {
    const char *name;
    Field field;
} FIELDS[] = {
    {"model", MODEL},       {"stream", STREAM},       {"messages", PROMPT}, {"prompt", PROMPT},
    {"input", PROMPT},      {"text", PROMPT},         {"input_ids", PROMPT}, {"token_ids", PROMPT},
    {"request_id", RARE},   {"n", RARE},              {"deadline_ms", RARE}, {"cache_salt", RARE},
    {"rid", RARE},          {"logprobs", RARE},       {"return_logprob", RARE}, {"session_id", RARE},
    {"user", RARE},         {"tools", RARE},          {"instructions", RARE}, {"prompt_logprobs", RARE},
    {"sampling_params", RARE}, {"system", RARE},
};

// RARE also for a name with escapes.
static Field field(Span name) {
    if (memchr(name.at, '\\', (size_t)(name.end - name.at))) return RARE;
    for (size_t i = 0; i < sizeof(FIELDS) / sizeof(*FIELDS); i++)
        if (is(name, FIELDS[i].name)) return FIELDS[i].field;
    return OTHER;
}

// The top-level values of an object; 0 if it has fields other than these.
static int fields(Span body, Span found[3]) {
    const char *at = blank(body.at, body.end), *end = body.end;
    if (at == end || *at != '{') return 0;
    do {
        at = blank(at + 1, end);
        if (at == end || *at != '"') return 0;
        const char *name = at + 1;
        if ((at = string(at, end)) == NULL) return 0;
        Field which = field((Span){name, at - 1});
        at = blank(at, end);
        if (at == end || *at != ':') return 0;
        const char *start = blank(at + 1, end);
        if ((at = value(start, end)) == NULL || which == RARE) return 0;
        if (which != OTHER) {
            if (found[which - 1].at != NULL) return 0;
            found[which - 1] = (Span){start, at};
        }
        at = blank(at, end);
    } while (at < end && *at == ',');
    return at < end && *at == '}' && blank(at + 1, end) == end;
}

// A name without escapes, None for null; NULL, with an error or without, if it is something else.
static PyObject *name_in(Span value) {
    if (value.at == NULL || is(value, "null")) Py_RETURN_NONE;
    if (*value.at != '"') return NULL;
    for (const char *c = value.at; c < value.end; c++)
        if (*c == '\\' || (unsigned char)*c < 32 || (unsigned char)*c > 126) return NULL;
    return PyUnicode_DecodeASCII(value.at + 1, value.end - value.at - 2, NULL);
}

// The first byte of the first item of a list; 0 if it is no list.
static char first_in(Span prompt) {
    if (prompt.at == prompt.end || *prompt.at != '[') return 0;
    const char *end = prompt.end - prompt.at > 64 ? prompt.at + 64 : prompt.end;
    const char *at = prompt.at + 1;
    while (at < end && (*at == ' ' || (*at >= '\t' && *at <= '\r'))) at++;
    return at < end ? *at : 0;
}

static Py_ssize_t tokens_in(Span prompt, char first) {
    if (first != '[' && (first < '0' || first > '9')) return (prompt.end - prompt.at) / 4;
    Py_ssize_t count = 1;
    for (const char *c = prompt.at; c < prompt.end; c++) count += *c == ',';
    return count;
}

static PyObject *peek(PyObject *module, PyObject *body) {
    if (!arguments("peek", &body, 1, 1, 0)) return NULL;
    Span found[3] = {{NULL, NULL}, {NULL, NULL}, {NULL, NULL}};
    if (!fields(span_of(body), found)) Py_RETURN_NONE;
    Span stream = found[STREAM - 1], prompt = found[PROMPT - 1];
    int streams = stream.at != NULL && is(stream, "true");
    if (stream.at != NULL && !streams && !is(stream, "false") && !is(stream, "null")) Py_RETURN_NONE;
    if (prompt.at == NULL || is(prompt, "null") || is(prompt, "[]") || is(prompt, "\"\"")) Py_RETURN_NONE;
    prompt.end--;
    PyObject *model = name_in(found[MODEL - 1]);
    if (model == NULL) {
        if (PyErr_Occurred()) return NULL;
        Py_RETURN_NONE;
    }
    PyObject *text = bytes_of(prompt.at, prompt.end);
    char first = first_in(prompt);
    return Py_BuildValue("(NONOn)", model, streams ? Py_True : Py_False, text, first == '{' ? Py_True : Py_False,
                         tokens_in(prompt, first));
}

// ------------------------------------------------------------------------------------------------- prefix keys

// Multiply and fold, in four lanes. Keys only predict cache contents: a forged key harms the placement of the forger's own
// requests.
static uint64_t fold(uint64_t a, uint64_t b) {
    __uint128_t product = (__uint128_t)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static uint64_t word(const char *at) {
    uint64_t w;
    memcpy(&w, at, 8);
    return w;
}

static const uint64_t SALT[4] = {0x9e3779b97f4a7c15u, 0xbf58476d1ce4e5b9u, 0x94d049bb133111ebu, 0xd6e8feb86659fd93u};

static uint64_t hashed(uint64_t key, const char *at, const char *end, uint64_t kind) {
    uint64_t size = (uint64_t)(end - at), secret[4], lane[4];
    for (int i = 0; i < 4; i++) lane[i] = secret[i] = fold(key ^ SALT[i], SALT[(i + 1) & 3] + kind);
    for (; end - at >= 64; at += 64)
        for (int i = 0; i < 4; i++) lane[i] = fold(word(at + 16 * i) ^ secret[i], word(at + 16 * i + 8) ^ lane[i]);
    char rest[64] = {0};
    memcpy(rest, at, (size_t)(end - at));
    for (int i = 0; i < 4; i++) lane[i] = fold(word(rest + 16 * i) ^ secret[i], word(rest + 16 * i + 8) ^ lane[i]);
    uint64_t all = fold(lane[0] ^ lane[1] ^ size, lane[2] + SALT[0]) ^ fold(lane[3] ^ SALT[1], lane[0] + SALT[2]);
    return fold(all ^ SALT[3], lane[1] ^ lane[3] ^ SALT[0]) >> 4;  // an int of two digits
}

static PyObject *cut_keys(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    if (!arguments("cut_keys", args, count, 4, 1)) return NULL;
    Py_ssize_t size = PyLong_AsSsize_t(args[2]), start = 0;
    Py_hash_t root = PyObject_Hash(args[0]);
    if (PyErr_Occurred()) return NULL;
    if (!PyTuple_CheckExact(args[3]) || size > PyBytes_GET_SIZE(args[1])) {
        PyErr_SetString(PyExc_ValueError, "cut_keys takes a tuple of cuts, and no size beyond the end");
        return NULL;
    }
    const char *prompt = PyBytes_AS_STRING(args[1]);
    PyObject *keys = PyList_New(0);
    uint64_t key = (uint64_t)root;
    for (Py_ssize_t i = 0; keys != NULL && i < PyTuple_GET_SIZE(args[3]); i++) {
        Py_ssize_t end = PyLong_AsSsize_t(PyTuple_GET_ITEM(args[3], i));
        if (end > size || end < start) break;
        key = hashed(key, prompt + start, prompt + end, 0);
        start = end;
        PyObject *number = PyLong_FromUnsignedLongLong(key);
        if (number == NULL || PyList_Append(keys, number) < 0) Py_CLEAR(keys);
        Py_XDECREF(number);
    }
    if (PyErr_Occurred()) Py_CLEAR(keys);
    return keys;
}

static PyObject *tail_key(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    if (!arguments("tail_key", args, count, 4, 1)) return NULL;
    Py_hash_t key = PyObject_Hash(args[0]);
    Py_ssize_t start = PyLong_AsSsize_t(args[2]), end = PyLong_AsSsize_t(args[3]);
    if (PyErr_Occurred()) return NULL;
    if (start < 0 || end < start || end > PyBytes_GET_SIZE(args[1])) {
        PyErr_SetString(PyExc_ValueError, "tail_key takes a range of the prompt");
        return NULL;
    }
    const char *prompt = PyBytes_AS_STRING(args[1]);
    return PyLong_FromUnsignedLongLong(hashed((uint64_t)key, prompt + start, prompt + end, 1));
}

// ------------------------------------------------------------------------------------------------ the index

// Whether there are `wanted` arguments, and the first are two dicts and a list of keys.
static int index_arguments(const char *name, PyObject *const *args, Py_ssize_t given, Py_ssize_t wanted) {
    if (given == wanted && PyDict_CheckExact(args[0]) && PyDict_CheckExact(args[1]) && PyList_CheckExact(args[2])) return 1;
    PyErr_Format(PyExc_TypeError, "%s takes %zd arguments, and first two dicts and a list of keys", name, wanted);
    return 0;
}

// The value for that key of the list; a new reference, because a comparison of keys may run other code. NULL without an error
// if there is none.
static PyObject *node_at(PyObject *young, PyObject *old, PyObject *keys, Py_ssize_t at) {
    if (at >= PyList_GET_SIZE(keys)) return NULL;
    PyObject *key = Py_NewRef(PyList_GET_ITEM(keys, at)), *node = PyDict_GetItemWithError(young, key);
    if (node == NULL && !PyErr_Occurred()) node = PyDict_GetItemWithError(old, key);
    Py_XINCREF(node);
    Py_DECREF(key);
    return node;
}

static const char *skipped(const char *at, const char *end, char wanted) {
    while (at < end && (*at == ' ' || (*at >= '\t' && *at <= '\r'))) at++;
    return at < end && *at == wanted ? at + 1 : NULL;
}

// Whether another message starts here: inside a text these quotes would be escaped.
static int message_follows(const char *at, const char *end) {
    if ((at = skipped(at, end, ',')) == NULL || (at = skipped(at, end, '{')) == NULL) return 0;
    return (at = skipped(at, end, '"')) != NULL && (STARTS(at, end, "role\"") || STARTS(at, end, "content\""));
}

static PyObject *message_end(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    if (!arguments("message_end", args, count, 2, 0)) return NULL;
    Span text = span_of(args[0]);
    Py_ssize_t before = PyLong_AsSsize_t(args[1]), size = text.end - text.at;
    if (before == -1 && PyErr_Occurred()) return NULL;
    if (before > size) before = size;
    const char *brace = before > 0 ? memrchr(text.at, '}', (size_t)before) : NULL;
    if (brace == NULL) return PyLong_FromLong(0);
    if (message_follows(brace + 1, text.end)) return PyLong_FromSsize_t(brace + 1 - text.at);
    // This brace is inside a text: only a key is an unescaped "role".
    const char *role = brace;
    do role = memrchr(text.at, '"', (size_t)(role - text.at));
    while (role != NULL && !STARTS(role, brace, "\"role\""));
    if (role != NULL) brace = memrchr(text.at, '}', (size_t)(role - text.at));
    return PyLong_FromSsize_t(role == NULL || brace == NULL ? 0 : brace + 1 - text.at);
}

static PyObject *runs(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    if (!index_arguments("runs", args, count, 3)) return NULL;
    PyObject *found = PyList_New(0);
    Py_ssize_t depth = 0;
    PyObject *run = found == NULL ? NULL : node_at(args[0], args[1], args[2], depth);
    while (run != NULL) {
        PyObject *next;
        while ((next = node_at(args[0], args[1], args[2], ++depth)) == run) Py_DECREF(next);
        PyObject *one = PyErr_Occurred() ? NULL : Py_BuildValue("(On)", run, depth);
        if (one == NULL || PyList_Append(found, one) < 0) Py_CLEAR(next);
        Py_XDECREF(one);
        Py_SETREF(run, next);
    }
    if (PyErr_Occurred()) Py_CLEAR(found);
    return found;
}

// The value for the key, removed from `old` if it is there; a new reference, an empty tuple if there is none.
static PyObject *taken(PyObject *young, PyObject *old, PyObject *key) {
    PyObject *node = PyDict_GetItemWithError(young, key);
    if (node != NULL) return Py_NewRef(node);
    if (PyErr_Occurred()) return NULL;
    node = PyDict_GetItemWithError(old, key);
    if (node == NULL) return PyErr_Occurred() ? NULL : PyTuple_New(0);
    Py_INCREF(node);
    if (PyDict_DelItem(old, key) < 0) Py_CLEAR(node);
    return node;
}

static PyObject *renew(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    if (!index_arguments("renew", args, count, 4)) return NULL;
    PyObject *run = NULL, *renewed = NULL;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(args[2]); i++) {
        PyObject *key = Py_NewRef(PyList_GET_ITEM(args[2], i)), *node = taken(args[0], args[1], key);
        if (node != NULL && node != run) Py_XSETREF(renewed, PyObject_CallOneArg(args[3], node));
        Py_XSETREF(run, node);
        int failed = node == NULL || renewed == NULL || PyDict_SetItem(args[0], key, renewed) < 0;
        Py_DECREF(key);
        if (failed) break;
    }
    Py_XDECREF(run);
    Py_XDECREF(renewed);
    if (PyErr_Occurred()) return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef METHODS[] = {
    {"request", (PyCFunction)(void (*)(void))request, METH_FASTCALL, NULL},
    {"answer", (PyCFunction)(void (*)(void))answer, METH_FASTCALL, NULL},
    {"read_whole", read_whole, METH_O, NULL},
    {"peek", peek, METH_O, NULL},
    {"cut_keys", (PyCFunction)(void (*)(void))cut_keys, METH_FASTCALL, NULL},
    {"tail_key", (PyCFunction)(void (*)(void))tail_key, METH_FASTCALL, NULL},
    {"message_end", (PyCFunction)(void (*)(void))message_end, METH_FASTCALL, NULL},
    {"runs", (PyCFunction)(void (*)(void))runs, METH_FASTCALL, NULL},
    {"renew", (PyCFunction)(void (*)(void))renew, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static int prepare(PyObject *module) {
    PyObject *type = PyType_FromSpec(&PIPE);
    int failed = type == NULL || PyModule_AddObjectRef(module, "Pipe", type) < 0;
    Py_XDECREF(type);
    return failed ? -1 : 0;
}

static PyModuleDef_Slot MODULE_SLOTS[] = {{Py_mod_exec, prepare}, {0, NULL}};
static struct PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT, "_headgate_fast_path", NULL, 0, METHODS, MODULE_SLOTS, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__headgate_fast_path(void) { return PyModuleDef_Init(&MODULE); }
