# The board's end of its serial line, for the host that looks after it: runs the commands that come in, whatever becomes
# of the network and of sshd. In: a line of number, seconds, command and the size of stdin, then stdin. Out: a line of
# number, exit status, stdout and stderr. All but stdin is in base64. Tools are busybox's.
umask 077
export PATH=/usr/sbin:/usr/bin HOME=/root
mkdir /run/serial-line && cd / || exit
while :; do
    while read -r number limit command size; do
        : >/run/serial-line/stdin
        [ "$size" = 0 ] || dd "bs=$size" count=1 iflag=fullblock of=/run/serial-line/stdin <&3
        timeout -s KILL "$limit" /bin/sh -c "umask 022; $(echo "$command" | base64 -d)" \
            </run/serial-line/stdin >/run/serial-line/stdout 2>/run/serial-line/stderr 3>&-
        code=$?
        echo "$number $code $(base64 -w 0 /run/serial-line/stdout) $(base64 -w 0 /run/serial-line/stderr)" >&3
    done <&3
    # No host is connected.
    sleep 0.2
done 3<>"$(echo /dev/vport*p1)"
